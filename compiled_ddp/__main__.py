"""`python -m compiled_ddp`."""

import sys

from compiled_ddp.command_line import main

sys.exit(main())
