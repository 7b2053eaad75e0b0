import demo
import pytest


class Started(Exception):
    """The demo began."""


def start(monkeypatch, out):
    def begin(folder, **options):
        raise Started
    monkeypatch.setattr(demo, "make_tiny_model", begin)
    monkeypatch.setattr("sys.argv", ["demo", "--out", str(out)])
    demo.main()


def test_only_an_earlier_demo_is_replaced(monkeypatch, tmp_path):
    run = tmp_path / "run/tiny/config.json"         # what a trainer without --model leaves in its --out
    run.parent.mkdir(parents=True)
    run.write_text("{}")
    with pytest.raises(SystemExit, match="run holds something that is not an earlier demo"):
        start(monkeypatch, tmp_path / "run")
    with pytest.raises(SystemExit, match="config.json holds something that is not an earlier demo"):
        start(monkeypatch, run)
    assert run.read_text() == "{}"
    with pytest.raises(Started):
        start(monkeypatch, tmp_path / "new/demo")
    (tmp_path / "new/demo/before.jsonl").touch()
    with pytest.raises(Started):
        start(monkeypatch, tmp_path / "new/demo")
    assert [p.name for p in (tmp_path / "new/demo").iterdir()] == [".demo"]
