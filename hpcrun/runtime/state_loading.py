"""Fills a script's state from a save, and refuses what does not fit."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hpcrun.checkpoint.chunk_reader import ChunkSource
from hpcrun.checkpoint.format import TensorEntry as StoredTensor
from hpcrun.errors import UsageError
from hpcrun.runtime import optimizer_state
from hpcrun.runtime.control import Control
from hpcrun.runtime.plain_values import (
    TYPE_TAG,
    KeyPath,
    PlainValueError,
    ValueNode,
    collect_types,
    encode_value,
    reject_other_values,
    render_key_path,
)
from hpcrun.runtime.resharding import dtype_name, raw_bytes
from hpcrun.runtime.save_opening import select_random_state
from hpcrun.runtime.state_match import (
    PlainValueTarget,
    StatefulTarget,
    StateMatch,
    StateMatcher,
    TensorTarget,
)
from hpcrun.runtime.state_tree import (
    RESERVED_PREFIXES,
    TENSOR_TAG,
    StateTree,
    build_state_tree,
    is_stateful,
    merge_trees,
    tensor_nodes,
    tree_differences,
    unflatten_state,
    unique_tensor_names,
    unpack_tree,
)
from hpcrun.runtime.tensor_memory import (
    TensorSamples,
    can_hold_all,
    overlapping_clusters,
    overlaps_itself,
    same_bytes,
    tensor_identity,
    tensor_problem,
    write_elements,
)


class StateLoader:
    """A state to be filled from a save: `fit` checks and changes nothing, `finish` sets what was read."""

    def __init__(self, control: Control, state: Mapping[str, Any], *, strict: bool, only: str) -> None:
        self._control, self._state, self._strict, self._only = control, state, strict, only
        self._state_dicts: dict[KeyPath, Any] = {}
        self._types: dict[str, type] = {}
        own = [keys for keys, _ in self._matching({}).leaves(state, ())]
        self._types = collect_types([dict(state), list(self._state_dicts.values())])
        paths = [render_key_path(keys) for keys in own]
        self._names = {name for names in control.allgather(paths) for name in names}
        self._match = StateMatch()
        self._copies: list[tuple[Tensor, Tensor]] = []
        """Tensors, and the contents to copy into them when all is read."""
        self._new: dict[tuple[str, str], Tensor] = {}
        """New tensors to pass to objects, by stored name and device."""
        if only and not any(f"{name}.".startswith(only) for name in self._names):
            raise UsageError(f"load: only={only!r}: nothing in the state is called so")

    def fit(self, where: str, world_size: int, source: ChunkSource) -> dict[str, Tensor]:
        """Select the tensors to fill from this save; UsageError where it is of another state."""
        tensors = source.manifest.tensors.items()
        stored = {name: tensor for name, tensor in tensors if not name.startswith(RESERVED_PREFIXES)}
        self._copies, self._new = [], {}
        self._match = match = self._matched(where, world_size, source, stored)
        entries = self._placed(source, match, stored)
        identities = {tensor_identity(target.tensor) for target in match.targets if target.tensor is not None}
        lacks = [
            render_key_path(keys)
            for keys, tensor in match.lacks
            if tensor is None or tensor_identity(tensor) not in identities - {None}
        ]
        if self._strict:
            mismatched = [_describe_problem(keys, problem) for keys, problem in match.mismatched]
            _refuse_mismatch(where, "has another shape or type of", mismatched)
            _refuse_mismatch(where, "lacks", lacks)
            extra = [render_key_path(keys) for keys in match.extra]
            _refuse_mismatch(where, "also holds", [path for path in extra if path not in self._names])
        self._make_states(where)
        return entries if self._only else entries | select_random_state(world_size, source, self._control)

    def finish(self) -> list[str]:
        """Set plain values and load objects; return notes on values that the objects have changed."""
        with torch.no_grad():
            for tensor, content in self._copies:
                write_elements(tensor, content)
        for target in self._match.values:
            _set_plain_value(target)
        notes = list[str]()
        for handover in self._match.objects:
            notes += self._load_object_state(handover)
        return notes

    def _matching(self, stored: Mapping[str, StoredTensor]) -> StateMatcher:
        return StateMatcher(self._state_dict_of, self._types, stored, self._only)

    def _state_dict_of(self, keys: KeyPath, owner: Any) -> Any:
        if keys not in self._state_dicts:
            self._state_dicts[keys] = owner.state_dict()
        return self._state_dicts[keys]

    def _matched(
        self, where: str, world_size: int, source: ChunkSource, stored: Mapping[str, StoredTensor]
    ) -> StateMatch:
        """Match with this rank's saved tree, or rank 0's; where something is missing, with all ranks'."""
        is_alike = world_size == self._control.size
        first = self._control.rank if is_alike else 0
        tree = _read_state_tree(where, source, first)
        if tree is None:
            tree = self._tree_from_names(stored)
        named = {node["v"] for _, node in tensor_nodes(tree, self._types)}
        matching = self._matching(stored)
        matching.walk(self._state, tree)
        if matching.match.lacks or (not is_alike and stored.keys() - named):
            for rank in range(world_size):
                other = _read_state_tree(where, source, rank) if rank != first else None
                tree = tree if other is None else merge_trees(tree, other, self._types)
            matching = self._matching(stored)
            matching.walk(self._state, tree)
        return matching.match

    def _tree_from_names(self, stored: Mapping[str, StoredTensor]) -> ValueNode:
        """Return a tree for a save that has only tensors, as those of `hpcrun train`."""
        leaves = self._matching({}).leaves(self._state, ())
        names = unique_tensor_names([keys for keys, tensor in leaves if tensor is not None])
        there = {keys: name for keys, name in names.items() if name in stored}
        tree = _tree_of_named_tensors(dict(self._state), there, self)
        left = sorted(stored.keys() - set(names.values()))
        tree["v"] += [[name, {TYPE_TAG: TENSOR_TAG, "v": name}] for name in left]
        return tree

    def _placed(
        self, source: ChunkSource, match: StateMatch, stored: Mapping[str, StoredTensor]
    ) -> dict[str, Tensor]:
        """Choose the memory that each tensor is read into; return it by stored name."""
        able = []
        for target in match.targets:
            problem = _why_not_readable(target, stored)
            if not problem:
                able.append(target)
                continue
            if target.is_free:
                problem = self._give_own_memory(target, stored)
            if problem:
                target.tensor = None
                match.mismatched.append((target.keys, problem))
        self._resolve_shared_memory(source, match, able, stored)
        entries = dict[str, Tensor]()
        copied = {id(tensor) for tensor, _ in self._copies}
        for target in match.targets:
            tensor = target.tensor
            if tensor is None or id(tensor) in copied:
                continue
            first = entries.setdefault(target.name, tensor.detach())
            if tensor_identity(first) != tensor_identity(tensor):
                self._copies.append((tensor.detach(), first))
        return entries

    def _resolve_shared_memory(
        self,
        source: ChunkSource,
        match: StateMatch,
        able: list[TensorTarget],
        stored: Mapping[str, StoredTensor],
    ) -> None:
        """Prevent that one memory is filled with two contents."""
        for numbers in overlapping_clusters([_require_tensor(target) for target in able]):
            cluster = [able[number] for number in numbers]
            first = _require_tensor(cluster[0])
            identities = {(tensor_identity(_require_tensor(target)), target.name) for target in cluster}
            if len(identities) == 1 and (isinstance(first, DTensor) or not overlaps_itself(first)):
                continue
            for target in [target for target in cluster if target.is_free]:
                if problem := self._give_own_memory(target, stored):
                    target.tensor = None
                    match.mismatched.append((target.keys, problem))
            cluster = [target for target in cluster if not target.is_free]
            if len(cluster) > 1 or (cluster and overlaps_itself(_require_tensor(cluster[0]))):
                self._fill_shared_memory(source, match, cluster)

    def _give_own_memory(self, target: TensorTarget, stored: Mapping[str, StoredTensor]) -> str:
        """Give a target new memory; return why that cannot be done."""
        saved, like = stored.get(target.name), target.like
        if saved is None:
            return "is not in the save's list of tensors"
        dtype: torch.dtype = getattr(torch, saved.dtype)
        if isinstance(like, DTensor) and tuple(like.shape) == saved.shape:
            target.tensor = torch.empty_like(like, dtype=dtype, requires_grad=False)
        elif target.is_sharded:
            return "was saved as a DTensor, and nothing says how it lies here; give the object its state"
        else:
            device = str(like.device) if like is not None and not like.is_meta else "cpu"
            # What was one tensor stays one.
            key = (target.name, device)
            if key not in self._new:
                self._new[key] = torch.empty(saved.shape, dtype=dtype, device=device)
            target.tensor = self._new[key]
        return ""

    def _fill_shared_memory(
        self, source: ChunkSource, match: StateMatch, cluster: list[TensorTarget]
    ) -> None:
        """Read the contents of tensors that share memory, if these agree where they overlap."""
        tensors = [_require_tensor(target) for target in cluster]
        problem = ""
        if any(isinstance(tensor, DTensor) for tensor in tensors):
            problem = "shares its memory with another tensor here, and is a DTensor"
        else:
            whole = {target.name: _read_whole(source, target.name) for target in cluster}
            contents = [whole[target.name] for target in cluster]
            if can_hold_all(tensors, contents):
                self._copies += [(tensor, content) for tensor, content in zip(tensors, contents, strict=True)]
                return
            others = ", ".join(render_key_path(target.keys) for target in cluster[1:]) or "itself"
            problem = f"shares its memory with {others} here, and was saved with other contents than that"
        match.mismatched.append((cluster[0].keys, problem))
        for target in cluster:
            target.tensor = None

    def _make_states(self, where: str) -> None:
        """Make the state to pass to each object; UsageError for what cannot be made here."""
        filled = {target.keys: target.tensor for target in self._match.targets}
        problems, able = list[str](), list[StatefulTarget]()

        def tensor_at(keys: KeyPath) -> Tensor:
            if (tensor := filled.get(keys)) is None:
                raise _UnfilledError
            return tensor

        for handover in self._match.objects:
            try:
                if handover.current is None:
                    handover.state = unflatten_state(handover.node, tensor_at, self._types, handover.keys)
                else:
                    handover.state = handover.current
                able.append(handover)
            except PlainValueError as error:
                problems.append(_describe_problem(error.keys, error.problem))
            except _UnfilledError:
                continue  # its tensor is among the mismatches already
        self._match.objects = able
        if self._strict:
            _refuse_mismatch(where, "has another shape or type of", problems)

    def _load_object_state(self, handover: StatefulTarget) -> list[str]:
        """Load one object, and check that its state is what was saved; return notes on plain values."""
        owner, name = handover.object, render_key_path(handover.keys)
        handed = build_state_tree(handover.state, handover.keys)
        before = TensorSamples(list(handed.tensors.values()))
        is_torchs = isinstance(owner, torch.optim.Optimizer) and handover.parameters is not None
        if is_torchs:
            optimizer_state.load_optimizer_state(owner, handover.state)
        else:
            owner.load_state_dict(handover.state)
        changed, values = self._changes(handover, handed, before)
        if is_torchs and (changed or values):
            assert handover.parameters is not None
            optimizer_state.set_optimizer_state_exactly(owner, handover.state, handover.parameters)
            changed, values = self._changes(handover, handed, before)
        if isinstance(owner, torch.optim.Optimizer | torch.nn.Module):
            changed, values = [*changed, *values], []
        if changed and self._strict:
            rest = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            raise UsageError(
                f"{changed[0]}{rest}: is not what was saved after load_state_dict of {name}"
                f" ({type(owner).__qualname__}); have it keep its state as it is, or load with strict=False"
            )
        changed += values
        return [f"{path} is not what was saved, after load_state_dict of {name}" for path in changed]

    def _changes(
        self, handover: StatefulTarget, handed: StateTree, before: TensorSamples
    ) -> tuple[list[str], list[str]]:
        """Return the names of tensors and of plain values that differ from what was passed."""
        try:
            after = build_state_tree(handover.object.state_dict(), handover.keys)
        except UsageError as error:
            return [], [str(error).removeprefix("state: ")]
        tensors = []
        in_place = set(before.changed())
        for number, (keys, tensor) in enumerate(handed.tensors.items()):
            now = after.tensors.get(keys)
            if now is None or (now.dtype, now.shape) != (tensor.dtype, tensor.shape):
                both = f"{_describe_tensor(tensor)} was saved, {_describe_tensor(now)} is there"
                tensors.append(f"{render_key_path(keys)} ({both})")
            elif tensor_identity(now) == tensor_identity(tensor):
                if number in in_place:
                    tensors.append(render_key_path(keys))
            elif not same_bytes(tensor, now):
                tensors.append(render_key_path(keys))
        gone = {keys for keys in handed.tensors if keys not in after.tensors}
        values = [
            render_key_path(keys)
            for keys in tree_differences(handed.tree, after.tree, self._types, handover.keys)
            if keys not in gone
        ]
        return tensors, values


class _UnfilledError(Exception):
    """A tensor of a state has no memory here."""


def _read_state_tree(where: str, source: ChunkSource, rank: int) -> ValueNode:
    """Read the tree that a rank saved; None where there is none."""
    name = f"hpcrun.{rank}"
    if name not in source.manifest.tensors:
        return None
    return unpack_tree(bytes(raw_bytes(_read_whole(source, name))), where)


def _read_whole(source: ChunkSource, name: str) -> Tensor:
    """Read a stored tensor and verify it."""
    stored = source.manifest.tensors[name]
    whole = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
    for piece, place in stored.chunks:
        part = torch.empty(piece.sizes, dtype=whole.dtype)
        source.read(piece, place, raw_bytes(part))
        whole[tuple(slice(o, o + s) for o, s in zip(piece.offsets, piece.sizes, strict=True))] = part
    return whole


def _tree_of_named_tensors(
    new: Any, names: Mapping[KeyPath, str], loading: StateLoader, keys: KeyPath = ()
) -> ValueNode:
    """Return a tree of those tensors of a state that have a name."""
    if keys in names:
        return {TYPE_TAG: TENSOR_TAG, "v": names[keys]}
    if is_stateful(new):
        new = loading._state_dict_of(keys, new)
    if isinstance(new, Mapping):
        below = {
            key: _tree_of_named_tensors(value, names, loading, (*keys, key)) for key, value in new.items()
        }
        pairs = [
            [encode_value(key, reject_other_values), node] for key, node in below.items() if node is not None
        ]
        return {TYPE_TAG: "dict", "v": pairs}
    if isinstance(new, list | tuple):
        items = [
            _tree_of_named_tensors(value, names, loading, (*keys, number)) for number, value in enumerate(new)
        ]
        return [node for node in items if node is not None]
    return None


def _require_tensor(target: TensorTarget) -> Tensor:
    assert target.tensor is not None
    return target.tensor


def _why_not_readable(target: TensorTarget, stored: Mapping[str, StoredTensor]) -> str:
    """Return why a stored tensor cannot be read into the present one; empty where it can."""
    tensor, saved = target.tensor, stored.get(target.name)
    if saved is None:
        return "is not in the save's list of tensors"
    if tensor is None:
        return "is not there"
    if problem := tensor_problem(tensor):
        return problem
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        return "is an inference tensor, which cannot be filled; clone it"
    if (saved.shape, saved.dtype) != (tuple(tensor.shape), dtype_name(tensor)):
        return f"{saved.dtype} {list(saved.shape)} was saved, here it is {_describe_tensor(tensor)}"
    return ""


def _set_plain_value(target: PlainValueTarget) -> None:
    """Set a plain value, in place where other references to it may exist."""
    container, key, value = target.container, target.key, target.value
    now = container[key]
    options = [
        getattr(now, name, None) == getattr(value, name, None) for name in ("default_factory", "maxlen")
    ]
    if type(now) is not type(value) or not all(options):
        container[key] = value
    elif isinstance(value, dict | set):
        now.clear()
        now.update(value)
    elif isinstance(value, list | bytearray):
        now[:] = value
    elif isinstance(value, deque):
        now.clear()
        now.extend(value)
    elif _is_writable_like(now, value):
        now[...] = value
    else:
        container[key] = value


def _is_writable_like(array: Any, value: Any) -> bool:
    is_alike = isinstance(value, np.ndarray) and (array.dtype, array.shape) == (value.dtype, value.shape)
    return is_alike and bool(array.flags.writeable)


def _describe_tensor(tensor: Tensor | None) -> str:
    return "none" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _describe_problem(keys: KeyPath, problem: str) -> str:
    return f"{render_key_path(keys)} ({problem})"


def _refuse_mismatch(where: str, verb: str, names: Sequence[str]) -> None:
    if names:
        rest = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise UsageError(
            f"{where}: {verb} {names[0]}{rest}; load with strict=False, or into the state that was saved (an"
            " optimizer that has not stepped yet has none: give the optimizer, not its state_dict())"
        )
