"""The micro-batch: how many sequences fit into a device's memory, found by a trial."""
import time
from collections.abc import Callable

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from runtime.cli import RunError, UserError, brief_error
from runtime.hardware import is_out_of_memory
from runtime.recipe import BatchSchedule


# The tokens of the largest micro-batch that --batch_size "auto" takes.
ON_A_GPU, ON_A_CPU = 65536, 4096


def most_sequences_that_fit(config, model: torch.nn.Module, device: str, reserved: int) -> int:
    """An estimate of the sequences of a micro-step that fit into a GPU's free memory.

    It is that of a compiled model. An eager one takes up to three times as much: then the trial
    fails, and the micro-batch is halved. `reserved` bytes have to stay free.
    """
    vectors = model.kept_vectors
    if config.recompute:
        vectors = 1             # of each block the input alone

    # A token has one row of logits, too; their gradient takes their place.
    numbers = config.vocab_size + config.n_layer * vectors * config.n_embd
    itemsize = 4 if config.dtype == "float32" else 2
    bytes_of_sequence = itemsize * numbers * config.sequence_length

    # Beside the sequences: the gradients, autocast's 16-bit copies of the weights, and work space
    # of cuBLAS and of attention.
    others = sum(p.nbytes for p in model.parameters()) + 100_000_000
    if itemsize == 2:
        others += sum(2 * p.numel() for p in model.parameters())
    free, _ = torch.cuda.mem_get_info(device)
    return max(1, int((free - others - reserved) / bytes_of_sequence))


def time_micro_step(
    state, T: int, device: str, B: int, reserved: int = 0, tries: int = 1
) -> float:
    """Seconds of a forward and backward of B sequences of T tokens, after a first that may compile.

    The shortest of several tries: other programs may have disturbed the others. `state`:
    train_gpt2.TrainState. Its weights do not change; its gradients are removed. `reserved` bytes of
    memory are in use meanwhile.
    """
    block = torch.empty(reserved, dtype=torch.uint8, device=device)
    seconds = []
    try:
        for _ in range(1 + tries):
            began = time.perf_counter()
            # A rank that runs out of memory must not leave the others waiting for its gradients.
            trial_micro_step(state, T, device, B, exchange=False)
            check_gradients(state)
            grads = [p.grad for p in state.model.parameters() if p.grad is not None]
            grads[0].sum().item()                               # waits for a GPU
            seconds.append(time.perf_counter() - began)
    finally:
        state.model.zero_grad(set_to_none=True)
        del block
    return min(seconds[1:])


def trial_micro_step(state, T: int, device: str, B: int, exchange: bool) -> None:
    """A forward and backward that trains nothing. `exchange`: DDP averages the gradients."""
    # Two tensors, as in a step: for one that is both, torch.compile would make another graph.
    x = torch.zeros(B, T, dtype=torch.int64, device=device)
    y = torch.zeros(B, T, dtype=torch.int64, device=device)

    if isinstance(state.ddp_model, DDP):
        # train_step sets this anew for each micro-step.
        state.ddp_model.require_backward_grad_sync = exchange
    # A model may change its buffers in each forward.
    before = [(buffer, buffer.clone()) for buffer in state.model.buffers()]
    with state.autocast:
        _, loss = state.ddp_model(x, y)
    loss.backward()
    for buffer, content in before:
        buffer.copy_(content)


def check_gradients(state) -> None:
    """UserError for a parameter that had no gradient in a trial: DDP would wait for it."""
    ddp = state.ddp_model
    if not isinstance(ddp, DDP) or ddp.find_unused_parameters:
        return
    for name, p in state.model.named_parameters():
        if p.requires_grad and p.grad is None:
            raise UserError(f"{name} gets no gradient, for which several processes wait: remove "
                            "it, freeze it (requires_grad_), or add find_unused_parameters=True "
                            "to DDP in train_gpt2.py")


def settle_buckets(state, T: int, process, B: int) -> None:
    """Has DDP make its buckets of gradients, which are final from the first step on.

    DDP sorts the gradients into other buckets after it has averaged them once. With three ranks or
    more the sum is rounded otherwise in another bucket: the first step of a resumed run would not
    have the bits that it has in a whole run.
    """
    trial_micro_step(state, T, process.device, B, exchange=True)
    with process.together():
        check_gradients(state)
    state.model.zero_grad(set_to_none=True)


def most_sequences(config, most_tokens: int = ON_A_CPU) -> int:
    """--batch_size, and if that is "auto" so many that they have at most `most_tokens`."""
    if config.batch_size == "auto":
        return max(1, most_tokens // config.sequence_length)
    return config.batch_size


def choose_micro_batch(config, schedule: BatchSchedule, state, process) -> int:
    """B, the sequences of every micro-batch: at most --batch_size, and a divisor of each step's.

    "auto" on a GPU is halved until it fits into the memory of every rank. What is compiled is
    compiled here: a run that cannot work ends before its first step.
    """
    # Micro-steps of more tokens are no faster, on an H200 and on CPUs (docs/speed.md).
    limit = most_sequences(config)
    if process.on_gpu:
        limit = most_sequences(config, ON_A_GPU)
    may_shrink = config.batch_size == "auto"
    reserved = 0
    if process.on_gpu:
        reserved = state.optimizer.bytes_to_allocate()      # the first step will allocate these
    if process.on_gpu and may_shrink:
        # Some memory stays free, because later steps leave gaps between what they allocate.
        free_bytes, _ = torch.cuda.mem_get_info(process.device)
        reserved += free_bytes // 20
        fitting = most_sequences_that_fit(config, state.model, process.device, reserved)
        limit = min(limit, fitting)

    def trial(B):
        time_micro_step(state, config.sequence_length, process.device, B, reserved)

    B = largest_micro_batch(config, may_shrink, limit, schedule, process, trial)
    if process.on_gpu:
        torch.cuda.reset_peak_memory_stats()        # what the trials took is no need of the run
    elif process.world_size > 1:
        settle_buckets(state, config.sequence_length, process, B)
    return B


def largest_micro_batch(
    config, may_shrink: bool, limit: int, schedule: BatchSchedule, process, trial: Callable
) -> int:
    """The largest B up to `limit` that choose_micro_batch may choose. `trial(B)` computes one."""
    # Later steps have as many sequences as the first one, or a multiple: every micro-batch of the
    # run has the same shape, and nothing is compiled twice.
    share = schedule.tokens(0) // config.sequence_length // process.world_size
    needs_trial = config.compile or (process.on_gpu and may_shrink)

    # The GPUs of the ranks may differ in size, but not their micro-batches.
    limit = min(process.gather(limit))
    while True:
        B = largest_divisor(share, limit)
        if B <= min(share, limit) // 4:
            process.print0(f"micro-batches of {B} are slow: a step has {share} sequences a "
                           f"process, of which {B} is the largest divisor up to {limit}. Choose a "
                           f"--total_batch_size of a multiple of {limit} sequences a process")
        if not needs_trial:
            return B

        with process.together():
            fits_here = fits_in_memory(trial, B, may_shrink, config.compile)
        torch.cuda.empty_cache()        # what the run allocates need not fit into a trial's blocks
        if all(process.gather(fits_here)):
            return B
        limit = B // 2


def largest_divisor(n: int, limit: int) -> int:
    """The largest divisor of n that is at most `limit`."""
    divisor = min(n, limit)
    while n % divisor != 0:
        divisor -= 1
    return divisor


def fits_in_memory(trial: Callable, B: int, may_shrink: bool, compiled: bool) -> bool:
    """Whether `trial(B)` fits. Any other failure of it is raised, with a remedy if we know one."""
    try:
        trial(B)
        return True
    except UserError:
        raise
    except Exception as error:          # the compiler, its backend and Triton raise many types
        if is_out_of_memory(error):
            if may_shrink and B > 1:
                return False
            raise
        if compiled:
            remedy = "train with --no_compile"
            if "failed to map segment" in str(error):
                remedy = ("set TORCHINDUCTOR_CACHE_DIR to a folder from which the system lets "
                          "programs run, because it does not from the usual one")
            raise RunError(f"torch.compile fails on this machine ({brief_error(error)}): {remedy}"
                           ) from None
        raise
