"""`python -m compiled_ddp`."""

import sys

from compiled_ddp.parity.command_line import main

sys.exit(main())
