"""`python -m loopwright`: the `loopwright` command."""

import sys

from .cli.main import main

sys.exit(main())
