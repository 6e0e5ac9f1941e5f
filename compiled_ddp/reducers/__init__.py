"""What reduces a bucket, and what is done to its values around that."""
