"""dpfed: differentially private federated fine-tuning. `engine.run.run` is a whole run, `config.load` its settings."""
