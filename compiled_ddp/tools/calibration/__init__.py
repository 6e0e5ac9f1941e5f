"""What a link and a machine can do, for users: `calibrate()`, and `compiled-ddp calibrate`."""
