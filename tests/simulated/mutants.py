"""Errors that could be in the device path, each as a patch of the package, and the test that must notice it."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[2] / "ssdtrain_fx"


@dataclasses.dataclass(frozen=True)
class Mutant:
    """``old``, which occurs once in ``module``, is replaced by ``new``."""

    name: str
    module: str
    old: str
    new: str
    test: str
    """A test of ``test_ordering``."""
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    device_type: str = "cuda"

    def apply(self, directory: Path) -> None:
        """Copy the package to ``directory`` and patch the copy."""
        shutil.copytree(PACKAGE, directory / "ssdtrain_fx", ignore=shutil.ignore_patterns("__pycache__"))
        path = directory / "ssdtrain_fx" / self.module
        text = path.read_text()
        assert text.count(self.old) == 1, f"{self.module} has {text.count(self.old)} times: {self.old}"
        path.write_text(text.replace(self.old, self.new))


CUDA, MOVER = "runtime/memory/cuda.py", "runtime/memory/stream_mover.py"
PINNED_BUFFERS, ACCELERATORS = "runtime/memory/accelerator.py", "accelerators.py"
ENGINE, LEDGER = "runtime/engine.py", "runtime/book/ledger.py"
READ_AHEAD = "runtime/lanes/read_ahead.py"
STAGED, TRANSPORT = "runtime/lanes/threads/staged.py", "runtime/lanes/threads/transport.py"
STREAMS, KVIKIO = "runtime/lanes/threads/device_streams.py", "runtime/lanes/threads/kvikio.py"
THREADS, ENDS, TIER = "runtime/lanes/threads/thread_lane.py", "runtime/lanes/ends.py", "runtime/policy/host_tier.py"

COPY_OUT = "test_a_copy_out_starts_after_the_kernel_that_computes_the_tensor"
OVERWRITTEN = "test_the_memory_of_a_released_tensor_is_overwritten_after_the_copy"
WRITTEN = "test_nothing_is_written_before_the_copy_is_over"
RELOAD = "test_a_reload_writes_after_what_was_enqueued_before_it"
AFTER_WAIT = "test_kernels_that_follow_wait_see_the_reloaded_bytes"
KEPT = "test_bytes_that_were_kept_in_memory_are_on_the_device_after_wait"
BUFFER = "test_a_staging_buffer_is_reused_after_the_copy_to_the_device"
WRITTEN_BUFFER = "test_a_staging_buffer_that_was_written_is_kept_for_the_copy_to_the_device"
SIDE = "test_copies_run_on_side_streams_and_delay_no_kernel"
LATE = "test_a_tensor_that_leaves_late_is_held_and_forwarded_in_order"
DROPPED = "test_a_reloaded_tensor_that_is_dropped_is_not_overwritten_late"
BACK = "test_every_staging_buffer_comes_back"
HOST = "test_the_host_tier_gives_back_the_same_bytes_held_demoted_and_read_ahead"
PINNED = "test_memory_is_pinned_once_and_given_back_at_close"
RUNS_AHEAD = "test_the_training_thread_does_not_wait_for_the_device"
FAILURE = "test_a_failure_of_the_device_reaches_the_training_thread"
FILE, STAGING, MEMORY = {"place": "file"}, {"place": "staging"}, {"place": "memory"}

MUTANTS = [
    # -- the mover -----------------------------------------------------------------------------------------------------
    Mutant("copy_out_waits_for_nothing", MOVER, "streams.out.wait_event(after)", "pass", COPY_OUT),
    Mutant("copy_out_waits_on_the_other_stream", MOVER, "streams.out.wait_event", "streams.back.wait_event", COPY_OUT),
    Mutant("copy_in_waits_for_nothing", MOVER, "streams.back.wait_event(mark)", "pass", RELOAD, FILE),
    Mutant("copy_in_waits_on_the_other_stream", MOVER, "streams.back.wait_event", "streams.out.wait_event", RELOAD, FILE),
    Mutant("copy_in_waits_for_the_last_mark_only", MOVER, "for mark in after:", "for mark in after[-1:]:", RELOAD, STAGING),
    Mutant("copy_in_waits_for_the_first_mark_only", MOVER, "for mark in after:", "for mark in after[:1]:", LATE),
    Mutant("copy_out_on_the_compute_stream", MOVER, "self._functions.stream(streams.out)", "self._functions.stream(None)", SIDE),
    Mutant("copy_in_on_the_compute_stream", MOVER, "self._functions.stream(streams.back)", "self._functions.stream(None)", SIDE),
    Mutant("copy_in_on_the_stream_out", MOVER, "self._functions.stream(streams.back)", "self._functions.stream(streams.out)", SIDE),
    Mutant("copy_out_marked_on_the_other_stream", MOVER, "self._record(streams.out)", "self._record(streams.back)", WRITTEN),
    Mutant("copy_in_marked_on_the_other_stream", MOVER, "self._record(streams.back)", "self._record(streams.out)", AFTER_WAIT),
    Mutant("marks_are_not_recorded", MOVER, "event.record(stream)", "pass", COPY_OUT),
    Mutant("wait_stream_does_nothing", MOVER, "self._functions.current_stream(device).wait_event(mark)", "pass", AFTER_WAIT),
    Mutant("wait_stream_blocks_the_host", MOVER, "self._functions.current_stream(device).wait_event(mark)", "mark.synchronize()", RUNS_AHEAD),
    Mutant("wait_host_does_nothing", MOVER, "mark.synchronize()", "pass", WRITTEN),
    Mutant("kept_bytes_are_not_waited_for", MOVER, "        self.wait_host(mark)\n", "", KEPT),
    Mutant("copy_out_blocks_the_host", MOVER, "as_bytes()[start : start + length], non_blocking=True", "as_bytes()[start : start + length]", RUNS_AHEAD),
    Mutant("copy_in_blocks_the_host", MOVER, "copy_(source[:length], non_blocking=True)", "copy_(source[:length])", RELOAD, FILE),
    Mutant("buffers_stay_registered", CUDA, "_error_of(self._functions.cudart().cudaHostUnregister(buffer.address))", "pass", PINNED),
    Mutant("buffers_are_not_registered", CUDA, "cudart.cudaHostRegister(buffer.address, buffer.size_bytes, _HOST_REGISTER_PORTABLE)", "0", RUNS_AHEAD),
    Mutant("a_refused_registration_is_ignored", CUDA, "            if error != 0:\n                buffer.pinned = None\n", "            if False:\n                buffer.pinned = None\n", "test_memory_that_cannot_be_pinned_is_an_error_that_says_what_to_do"),
    # -- devices that torch does not know ------------------------------------------------------------------------------
    Mutant("staging_is_not_pinned", PINNED_BUFFERS, "device=\"cpu\", pin_memory=True", "device=\"cpu\"", RUNS_AHEAD, {}, "simulated"),
    Mutant("pinned_memory_is_inherited", PINNED_BUFFERS, "mmap.MADV_DONTFORK)", "_MADV_DOFORK)", "test_a_forked_process_does_not_inherit_staging_until_it_is_given_back", {}, "simulated"),
    Mutant("pinned_memory_is_never_inherited_again", PINNED_BUFFERS, "            buffer.forget()\n", "            pass\n", "test_a_forked_process_does_not_inherit_staging_until_it_is_given_back", {}, "simulated"),
    Mutant("pinned_memory_is_not_aligned", PINNED_BUFFERS, "skip = -memory.data_ptr() % ALIGNMENT_BYTES", "skip = 0", "test_pinned_memory_is_aligned_for_direct_io", {}, "simulated"),
    Mutant("a_refusal_to_pin_has_no_advice", PINNED_BUFFERS, "raise pinning_error(self.size_bytes, str(error).splitlines()[0]) from error", "raise", "test_memory_that_cannot_be_pinned_is_an_error_that_says_what_to_do", {}, "simulated"),
    Mutant("every_stream_is_the_current_one", ACCELERATORS, "        return torch.Stream(device=device)", "        return torch.accelerator.current_stream(device)", SIDE, {}, "simulated"),
    Mutant("no_stream_is_entered", ACCELERATORS, "        return stream\n", "        import contextlib\n        return contextlib.nullcontext()\n", SIDE, {}, "simulated"),
    # -- the engine ----------------------------------------------------------------------------------------------------
    Mutant("release_does_not_order_the_stream", ENGINE, "            for mark in copied:\n                lane.mover.wait_stream(mark, entry.device)\n", "", OVERWRITTEN),
    Mutant("release_forgets_the_copies", ENGINE, "copied = [chunk.copied for chunk in entry.chunks if chunk.copied is not None]", "copied = []", OVERWRITTEN),
    Mutant("release_orders_the_first_copy_only", ENGINE, "for mark in copied:", "for mark in copied[:1]:", "test_all_chunks_of_a_released_tensor_are_copied_before_it_is_overwritten"),
    Mutant("wait_does_not_order_the_stream", ENGINE, "            for mark in fill.marks:\n                lane.mover.wait_stream(mark, entry.device)\n", "", AFTER_WAIT),
    Mutant("wait_orders_the_first_copy_only", ENGINE, "for mark in fill.marks:", "for mark in fill.marks[:1]:", "test_all_chunks_of_a_tensor_have_arrived_after_wait"),
    Mutant("another_layout_is_copied_too_early", ENGINE, "            for mark in fill.marks:\n", "            if fill.temporary is not None:\n                copy_elements(fill.temporary, y)\n            for mark in fill.marks:\n                fill.temporary = None\n", "test_a_reload_in_another_layout_reads_the_stored_bytes_after_they_have_arrived"),
    Mutant("a_reload_is_ready_as_early_as_its_offload", ENGINE, "Fill(entry, y, temporary, lane.mover.mark(y.device))", "Fill(entry, y, temporary, entry.ready)", RELOAD, FILE),
    Mutant("a_reload_ahead_is_ready_as_early_as_its_offload", READ_AHEAD, "Fill(entry, y, None, lane.mover.mark(y.device))", "Fill(entry, y, None, entry.ready)", "test_a_reload_that_is_begun_ahead_writes_after_what_was_enqueued_before_it"),
    Mutant("a_reload_ahead_serves_any_stream", READ_AHEAD, "ahead.stream == lane.mover.stream(device)", "True", "test_a_reload_that_was_begun_ahead_for_another_stream_is_not_used"),
    Mutant("a_tensor_is_ready_before_its_dense_copy", ENGINE, "            moved = movable(source)\n", "            early = lane.mover.mark(x.device)\n            moved = movable(source)\n            mark, lane.mover.mark = lane.mover.mark, lambda _: (setattr(lane.mover, 'mark', mark), early)[1]\n", "test_a_dense_copy_of_a_tensor_with_gaps_is_complete_before_it_leaves"),
    # -- the lane ------------------------------------------------------------------------------------------------------
    Mutant("a_copy_out_counts_as_over_at_once", STAGED, "            if copied is None:\n", "            if True:\n", WRITTEN),
    Mutant("the_device_is_not_followed", STREAMS, "                self._mover.wait_host(mark)\n", "", WRITTEN),
    Mutant("a_copy_in_counts_as_over_at_once", TRANSPORT, "        if mark is None or buffer is None:\n", "        if mark is not None:\n            fill.marks.append(mark)\n        if True:\n", BUFFER),
    Mutant("the_marks_of_a_reload_are_lost", TRANSPORT, "            fill.marks.append(mark)\n", "", AFTER_WAIT),
    Mutant("the_target_is_dropped_at_once", TRANSPORT, "            fill.marks.append(mark)\n", "            fill.marks.append(mark)\n            fill.target = None\n", DROPPED, {"waited": False}),
    Mutant("the_source_is_dropped_at_once", STAGED, "            chunk.staging, chunk.copied, chunk.state = buffer, copied, ChunkState.STAGED\n", "            chunk.staging, chunk.copied, chunk.state = buffer, copied, ChunkState.STAGED\n            self._ledger.drop_source(entry)\n", LATE),
    Mutant("a_forward_does_not_wait_for_the_copy_out", STAGED, "(fill.ready, copied)", "(fill.ready,)", LATE),
    Mutant("a_forward_does_not_wait_for_its_target", STAGED, "(fill.ready, copied)", "(copied,)", RELOAD, STAGING),
    Mutant("a_read_does_not_wait_for_its_target", TRANSPORT, "chunk.start, chunk.length, (fill.ready,))\n        with self._ledger.lock:", "chunk.start, chunk.length, ())\n        with self._ledger.lock:", RELOAD, MEMORY),
    Mutant("a_staged_read_does_not_wait_for_its_target", STAGED, "mark = self._mover.copy_in(buffer, target, chunk.start, chunk.length, (fill.ready,))", "mark = self._mover.copy_in(buffer, target, chunk.start, chunk.length, ())", RELOAD, FILE),
    Mutant("a_forward_does_not_use_its_buffer", STAGED, "            chunk.staging.users += 1\n", "            pass\n", WRITTEN_BUFFER),
    Mutant("dropped_staging_is_lost", STAGED, "        assert buffer is not None\n        self._pool.drop_user(buffer)\n\n    def _is_staged", "        assert buffer is not None\n\n    def _is_staged", BACK),
    Mutant("the_buffer_of_a_cancelled_write_is_lost", STAGED, "            chunk.staging = None\n            self._pool.drop_user(buffer)\n", "            chunk.staging = None\n", BACK),
    Mutant("the_buffer_of_a_read_is_lost", ENDS, "            self._pool.drop_user(buffer)\n", "            pass\n", BACK),
    Mutant("dead_bytes_are_held", STAGED, "if chunk.entry.host and not chunk.entry.unneeded_on_disk:", "if chunk.entry.host:", "test_a_tensor_that_dies_on_its_way_is_not_held"),
    Mutant("a_demoted_chunk_is_not_counted", STAGED, "            self._ledger.demote(chunk)\n", "", HOST),
    Mutant("forgotten_chunks_stay_in_staging", STAGED, "            self._drop_from_staging(chunk)\n        if chunks:", "            pass\n        if chunks:", BACK),
    Mutant("buffers_are_freed_while_the_device_copies", THREADS, "        if not self._streams.drain(patience):\n            return False\n", "", "test_close_waits_for_the_copies_that_the_device_still_makes"),
    Mutant("copies_that_nobody_follows_are_forgotten", THREADS, "marks = self.mover.last_marks()", "marks = []", "test_a_copy_whose_caller_was_interrupted_ends_before_its_buffer_is_freed"),
    # -- the host tier -------------------------------------------------------------------------------------------------
    Mutant("a_chunk_that_was_taken_stays_ahead", TIER, "        chunks.remove(chunk)\n", "        pass\n", BACK),
    Mutant("chunks_ahead_are_not_forgotten", TIER, "return held + ahead", "return held", BACK),
    Mutant("held_chunks_are_not_forgotten", TIER, "return held + ahead", "return ahead", BACK),
    # -- tensors that stay ---------------------------------------------------------------------------------------------
    Mutant("a_tensor_that_stayed_may_be_unaligned", "runtime/policy/residents.py", 'x.device.type == "cpu" or x.data_ptr() % TRITON_ALIGNMENT_BYTES == 0', "True", "test_a_tensor_that_stayed_is_aligned_as_kernels_take_for_granted"),
    # -- direct transfers ----------------------------------------------------------------------------------------------
    Mutant("a_direct_write_waits_for_nothing", KVIKIO, "self._begin_after(chunk.entry.ready, Direction.WRITE)", "self._begin_after(None, Direction.WRITE)", "test_a_direct_write_starts_after_the_kernel_that_computes_the_tensor"),
    Mutant("a_direct_read_waits_for_nothing", KVIKIO, "self._begin_after(fill.ready, Direction.READ)", "self._begin_after(None, Direction.READ)", "test_a_direct_read_starts_after_what_was_enqueued_before_the_reload"),
]  # fmt: skip
"""Sorted by module."""

QUICK = ("copy_out_waits_for_nothing", "release_does_not_order_the_stream", "wait_does_not_order_the_stream", "a_copy_in_counts_as_over_at_once", "a_forward_does_not_wait_for_the_copy_out")  # fmt: skip
"""Those that the quick tests try; ``make test-all`` tries all of them."""
