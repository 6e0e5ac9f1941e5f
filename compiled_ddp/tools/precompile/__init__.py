"""`compiled-ddp precompile`: fills a folder with what the ranks of a job will need compiled, before it starts."""
