"""Run by tests/test_long_context.py: examples/long_context.py on a device that holds no activations, with a right or a
broken attention.

    long_context.py EXAMPLES right|broken FLAGS

Nothing compares packed rows with padded ones where attention is broken: that would find it in the first rows.
"""

import runpy
import sys

from trlx_hybrid.session import Session
from trlx_hybrid_training import attention, layer_memory, recomputation
from trlx_hybrid_training.scoring import Packed


def halves(segments, prefixes):
    """Segments and prefixes of rows that are cut in the middle: the second half is a row of its own."""
    parts, seconds = [], {}
    for row, own in enumerate(segments):
        first, shared = prefixes[row] if prefixes else (row, 0)
        if shared:
            parts.append((own, (seconds[first], shared - segments[first] // 2)))
        else:
            seconds[row] = len(parts) + 1
            parts += [(own // 2, (len(parts), 0)), (own - own // 2, (len(parts) + 1, 0))]
    lengths, prefixes = zip(*parts, strict=True)
    return lengths, prefixes


def forgetful(*inputs, segments=None, prefixes=(), stock=attention.attention, **given):
    """Attention of packed rows in which the second half of a row does not see the keys of the first."""
    if segments is not None:
        segments, prefixes = halves(segments, prefixes)
    return stock(*inputs, segments=segments, prefixes=prefixes, **given)


def trust(self, rows):
    """Take packed rows for right, without the comparison with padded ones."""
    self._compared.add(id(rows.model))


def main(examples, kind, *flags):
    """Change what the kind says, and run the example."""
    Session.free_bytes = lambda self: 0
    layer_memory.WORTH, recomputation.OFFLOADING = 0, ("cpu",)
    if kind == "broken":
        attention.attention, Packed._prepare = forgetful, trust
    sys.path.insert(0, examples)
    sys.argv = ["long_context.py", *flags]
    runpy.run_path(f"{examples}/long_context.py", run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
