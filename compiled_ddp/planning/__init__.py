"""Before anything runs: which gradient goes into which bucket, and in which order buckets are launched."""
