"""Makes torch's vector math on a CPU exact from its first call on.

Why: torch computes sqrt, exp, tanh, erf, log, sin and their like on a CPU by MKL's vector functions. The first call
in a process finds out which code suits the processor, and keeps the answer in one variable of MKL for all of these
functions. It stores an intermediate number there first. If two threads make the first call together, as
``torch.sqrt`` of a large tensor does, the second thread may read that number. On Intel processors it stands for code
of low accuracy: the second thread's part of the result is then wrong by up to 3e-4. Later calls are right.

In training, this call is often the first step of AdamW. Two runs that should agree to the bit then differ from there
on, with offloading and without it. docs/reports/first_vector_math_call.md tells the whole story.
"""

from __future__ import annotations

import torch


def settle_vector_math() -> None:
    """Let this thread alone make the first call of a vector-math function. Further calls change nothing."""
    # One element is computed by one thread. The device is named because the caller may have set another default.
    torch.sqrt(torch.ones(1, device="cpu"))
