"""The other ranks: talking to them, agreeing with them, and saying where each stands when one does not answer."""
