"""`python -m cli` is `mini-infer`."""

import sys

from cli.main import main

sys.exit(main())
