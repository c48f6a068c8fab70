from __future__ import annotations

import http.server
import importlib.util
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).parents[1] / ".ci" / "torch_index.py"


@pytest.fixture
def chooser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, as on a Linux machine without a GPU."""
    spec = importlib.util.spec_from_file_location("torch_index", FILE)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "NVIDIA_FILES", (tmp_path / "nvidia0",))
    monkeypatch.setattr(module.sys, "platform", "linux")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("no_proxy", "*")
    return module


class Index(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/cpu/torch/" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def index() -> Iterator[str]:
    with http.server.HTTPServer(("127.0.0.1", 0), Index) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_without_a_gpu_the_cpu_build_is_taken(chooser: Any, index: str) -> None:
    assert chooser.choose_options(f"{index}/cpu") == f"--extra-index-url {index}/cpu"


def test_an_index_without_torch_is_none(chooser: Any, index: str) -> None:
    assert chooser.choose_options(f"{index}/other") == ""


@pytest.mark.parametrize("sign", ["device", "program"])
def test_with_a_gpu_the_plain_build_is_taken(chooser: Any, index: str, tmp_path: Path, sign: str) -> None:
    path = tmp_path / ("nvidia0" if sign == "device" else "nvidia-smi")
    path.write_text("")
    path.chmod(0o755)
    assert chooser.choose_options(f"{index}/cpu") == ""


def test_a_silent_index_is_given_up_soon(chooser: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chooser, "TIMEOUT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        began = time.monotonic()
        assert chooser.choose_options(f"http://127.0.0.1:{server.getsockname()[1]}") == ""
        assert time.monotonic() - began < 30


def test_an_address_that_leads_nowhere_is_none(chooser: Any) -> None:
    assert chooser.choose_options("http://nowhere.invalid/cpu") == ""
