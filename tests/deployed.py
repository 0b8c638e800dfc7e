"""What the files of deploy/ start, as tests read them."""

import re
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[1] / "deploy"


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def coordinator_in(name: str) -> tuple[str, set[str]]:
    """The script that starts it, as its shell gets it, and where its volumes appear."""
    if name == "compose.yaml":
        told = documents(name)[0]["services"]["coordinator"]
        # Compose fills in ${…} from its own environment, which has none here, and makes $ of $$.
        script = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", told["command"][0]).replace("$$", "$")
        return script, {one.split(":")[1] for one in told["volumes"]}
    (spec,) = (
        each["spec"]["template"]["spec"]["containers"][0]
        for each in documents(name)
        if each["metadata"]["name"] == "atoll-coordinator" and each["kind"] == "StatefulSet"
    )
    assert spec["envFrom"] == [{"secretRef": {"name": "atoll-backup", "optional": True}}]
    return spec["args"][0], {one["mountPath"] for one in spec["volumeMounts"]}
