"""Saved-tensor hooks that AOTAutograd inlines: a step that is compiled within them stays as it is."""

from __future__ import annotations

import logging

from ssdtrain_fx import _torch_private

log = logging.getLogger(__name__)


def hooks_need_saved_tensors() -> bool:
    """Whether the graphs that are being partitioned must not be rewritten. Warns if so.

    The hooks become part of the graphs after they are partitioned. Then they would compute with tokens: a hook that
    quantizes activations would do nothing, or overwrite the token.
    """
    if not _torch_private.saved_tensor_hooks_are_inlined():
        return False
    log.warning(
        "nothing is moved: the step is compiled within saved-tensor hooks that are graph modules. They become part of "
        "the graphs, and would get tokens instead of tensors. Compile and run it outside of the hooks."
    )
    return True
