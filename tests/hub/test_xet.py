"""Large files through xet, with its store in a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .runs import trainer_of
from .server import HubServer


def test_large_files_go_through_xet(online: HubServer, tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("hf_xet")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    store = tmp_path / "store"
    store.mkdir()
    online.casdir = str(store)
    trainer_of(hub_strategy="checkpoint", max_steps=2).train()
    head = online.repo().head()
    manifest = json.loads(head["last-checkpoint/manifest.json"])
    assert manifest["step"] == 2 and {f"last-checkpoint/{name}" for name in manifest["files"]} <= {*head}
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert head[f"last-checkpoint/{name}"].decode() == manifest["files"][name]["sha256"], "the server has its hash"
    assert [path for path in store.rglob("*") if path.is_file()], "the content is in the store"
    assert online.uploads == []
