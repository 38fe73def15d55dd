# SPDX-FileCopyrightText: The lightning-resilience authors
# SPDX-License-Identifier: Apache-2.0
"""A mapped checkpoint: nothing is copied while it is restored, and nothing maps it afterwards."""

from __future__ import annotations

import mmap
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.serialization import set_default_mmap_options

from lightning_resilience.adapters.lightning import mappings as module
from lightning_resilience.adapters.lightning.loading import on_cpu
from lightning_resilience.adapters.lightning.mappings import Mappings


if TYPE_CHECKING:
    from collections.abc import Mapping


OPTIONS: Mapping[str, Any] = {"weights_only": True, "map_location": on_cpu}

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/maps").exists(), reason="what is mapped is known on Linux only"
)


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A checkpoint with two tensors, and one that is a part of the first."""
    first = torch.arange(1000.0)
    path = tmp_path / "a.ckpt"
    torch.save({"first": first, "part": first[10:20], "second": torch.ones(3, 4)}, path)
    return str(path)


def maps_of(path: str) -> list[str]:
    """Return the lines of the kernel's list that are about a file."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if path in line]


def test_what_is_loaded_is_in_the_file_until_it_is_let_go_of(path: str) -> None:
    """The values stay, and so does which tensors share memory."""
    mappings = Mappings()
    loaded = mappings.load(path, OPTIONS)
    assert maps_of(path)

    mappings.let_go()

    assert maps_of(path) == []
    assert torch.equal(loaded["first"], torch.arange(1000.0))
    assert torch.equal(loaded["second"], torch.ones(3, 4))
    loaded["first"][10] = -1
    assert loaded["part"][0] == -1


def test_the_state_of_an_optimizer_on_the_cpu_is_let_go_of(path: str) -> None:
    """It takes the tensors of its state as they are, and goes on with the copies."""
    weight = torch.nn.Parameter(torch.ones(1000))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    mappings = Mappings()
    state = optimizer.state_dict()
    state["state"] = {0: {"momentum_buffer": mappings.load(path, OPTIONS)["first"]}}
    optimizer.load_state_dict(state)
    del state
    buffer = optimizer.state[weight]["momentum_buffer"]
    assert maps_of(path)

    mappings.let_go()

    assert maps_of(path) == []
    assert optimizer.state[weight]["momentum_buffer"] is buffer
    weight.sum().backward()
    optimizer.step()
    assert torch.allclose(buffer, 0.9 * torch.arange(1000.0) + 1)


def test_parameters_and_their_views_are_let_go_of(path: str) -> None:
    """Whoever has assigned what was loaded: the same objects, with their gradients."""
    mappings = Mappings()
    loaded = mappings.load(path, OPTIONS)
    weight = torch.nn.Parameter(loaded["first"])
    view = weight.detach().view(10, 100).t()
    del loaded

    mappings.let_go()

    assert maps_of(path) == []
    assert weight.data_ptr() == view.data_ptr()
    assert torch.equal(view, torch.arange(1000.0).view(10, 100).t())
    (weight * 2).sum().backward()
    assert weight.grad is not None


def test_what_nobody_has_any_more_takes_no_copy(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cycle that keeps a checkpoint is no reason to copy it."""
    mappings = Mappings()
    loaded = mappings.load(path, OPTIONS)
    loaded["itself"] = loaded
    del loaded
    copied: list[Any] = []
    monkeypatch.setattr(module, "_replace", copied.append)

    mappings.let_go()

    assert (maps_of(path), copied) == ([], [])


def test_what_is_written_to_a_tensor_never_reaches_the_file(path: str) -> None:
    """Also where the user has chosen maps that do."""
    before = Path(path).read_bytes()
    with set_default_mmap_options(mmap.MAP_SHARED):
        loaded = Mappings().load(path, OPTIONS)
        loaded["first"].fill_(7)

    assert Path(path).read_bytes() == before


def test_a_file_that_was_removed_is_let_go_of(path: str) -> None:
    """The kernel has another name for it then."""
    mappings = Mappings()
    loaded = mappings.load(path, OPTIONS)
    Path(path).unlink()
    assert maps_of(path)

    mappings.let_go()

    assert maps_of(path) == []
    assert loaded["first"][999] == 999


def test_what_has_an_address_only_is_let_go_of(path: str) -> None:
    """An array knows nothing of a tensor, and finds its numbers where they were."""
    mappings = Mappings()
    array = mappings.load(path, OPTIONS)["first"].numpy()

    mappings.let_go()

    assert maps_of(path) == []
    assert array.tolist() == list(range(1000))
    array[5] = 7
    assert array[5] == 7


def test_a_map_of_the_users_own_stays(path: str) -> None:
    """Of the same file, where nothing of ours is in use."""
    own = torch.load(path, mmap=True, weights_only=True)
    mappings = Mappings()
    loaded = mappings.load(path, OPTIONS)

    mappings.let_go()

    assert len(maps_of(path)) == 1
    for each in (own, loaded):
        assert torch.equal(each["first"], torch.arange(1000.0))
        assert torch.equal(each["second"], torch.ones(3, 4))


def test_only_what_is_in_use_takes_memory(tmp_path: Path) -> None:
    """Of a large checkpoint of which a small part is kept, that part."""
    path = str(tmp_path / "a.ckpt")
    torch.save({"large": torch.ones(2**22), "small": torch.ones(10)}, path)
    mappings = Mappings()
    small = mappings.load(path, OPTIONS)["small"]
    copied: list[list[tuple[int, int]]] = []
    replace = module._replace

    def note(place: tuple[int, int], pages: list[tuple[int, int]]) -> bool:
        copied.append(pages)
        return replace(place, pages)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_replace", note)
        mappings.let_go()

    assert maps_of(path) == []
    assert torch.equal(small, torch.ones(10))
    assert sum(end - start for pages in copied for start, end in pages) <= 2 * mmap.PAGESIZE


def test_a_map_that_cannot_be_replaced_is_told(
    path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The run goes on, and the user knows what must not be done."""
    mappings = Mappings()
    loaded = mappings.load(path, OPTIONS)
    monkeypatch.setattr(module, "_replace", lambda _place, _pages: False)

    mappings.let_go()

    assert loaded["first"][5] == 5
    assert f"{path} stays mapped" in caplog.text


def test_only_an_archive_as_torch_writes_it_is_mapped(path: str, tmp_path: Path) -> None:
    """Not the older format, not one that is packed, and not what is no checkpoint at all."""
    legacy, packed, other = (tmp_path / name for name in ("legacy", "packed", "other"))
    torch.save({"a": torch.ones(1)}, legacy, _use_new_zipfile_serialization=False)
    with zipfile.ZipFile(path) as plain, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for item in plain.infolist():
            new.writestr(item.filename, plain.read(item))
    other.write_bytes(b"")

    found = [Mappings().may_map(str(each), OPTIONS) for each in (path, legacy, packed, other)]

    assert found == [True, False, False, False]
    assert not Mappings().may_map(path, {**OPTIONS, "map_location": "cpu"})


def test_a_shared_filesystem_is_not_mapped(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another node may change the file, and that kills the process."""
    monkeypatch.setattr(module, "filesystem_kind", lambda _path: "nfs4")

    assert not Mappings().may_map(path, OPTIONS)
