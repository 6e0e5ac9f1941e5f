"""What a wrapper is made of: arguments and attributes, set-up, forwards, copies, hooks that are registered on it."""
