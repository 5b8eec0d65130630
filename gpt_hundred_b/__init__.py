"""GPT-3 at a hundred billion parameters and more: tensor x pipeline x sharded-data x data parallel."""
