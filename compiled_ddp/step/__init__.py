"""One step: forwards, the synchronised backward, and what lives from one step to the next."""
