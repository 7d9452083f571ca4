"""The module that the fork server of `processes.py` imports: scripts then start with the stack imported."""

from .stack import import_stack, prepare_for_engines

import_stack()
prepare_for_engines()
