"""What tells that a gradient stayed local, or was averaged with another step's."""
