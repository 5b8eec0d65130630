"""Real text and MLPerf shards -> what each rank computes."""
