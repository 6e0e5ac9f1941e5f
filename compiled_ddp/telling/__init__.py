"""What the package tells while it works: one logger, and work that takes long."""
