"""From step to step: forwards, when a synchronised backward begins and how it ends, and what outlives it."""
