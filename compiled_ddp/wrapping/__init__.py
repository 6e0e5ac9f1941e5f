"""What a wrapper is besides its steps: its arguments and attributes, copies, hooks that are registered on it."""
