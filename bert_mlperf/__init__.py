"""BERT-Large pretraining to 72 % masked-LM accuracy under the MLPerf Training rules, without a padded token."""
