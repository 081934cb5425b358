"""What `nibblelm info --supported` lists is what README says and what the families read."""

import json
from pathlib import Path

import pytest

from nibblelm.cli import main
from nibblelm.cli.supported import table
from nibblelm.errors import ConfigError
from nibblelm.models import families, family

README = Path(__file__).resolve().parent.parent.parent / "README.md"


def test_readme_has_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--supported"]) == 0
    assert capsys.readouterr().out.rstrip("\n") == table()
    assert table() in README.read_text()
    assert main(["info", "--supported", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [*listed] == [*families()]
    assert "`rope`" in listed["llama"]
    assert main(["info", "--supported", "--strict"]) == 1
    assert "--strict" in capsys.readouterr().err


@pytest.mark.parametrize("model_type", families())
def test_values_that_are_not_supported_are_refused_by_name(model_type: str) -> None:
    module = family({"model_type": model_type})
    needed = {name: 64 for name, key in module.KEYS.items() if key.type is int and key.only is None}
    for name, key in module.KEYS.items():
        if key.only is None or key.type is dict:
            continue
        wrong = {bool: not key.only[0], str: "other", int: 17, float: 17.5}[key.type]
        with pytest.raises(ConfigError, match=rf"{name} = .* is not supported; supported: "):
            module.read_config({"model_type": model_type, **needed, name: wrong})
