"""The manifests and network.sh in launch/, and the Dockerfile; they are read, not run."""

import re
import sys
from pathlib import Path

import yaml
from shell import succeed

PROJECT = Path(__file__).parents[1] / "template"


def manifests(name: str) -> dict[str, dict]:
    """Return the manifests in a file, by kind."""
    text = (PROJECT / "launch" / name).read_text()
    return {manifest["kind"]: manifest for manifest in yaml.safe_load_all(text)}


def check(manifest: dict) -> None:
    import kubernetes_validate

    kubernetes_validate.validate(manifest, "1.33", strict=True)


def test_the_manifests_fit_the_schemas_of_kubernetes_and_kubeflow():
    from kubeflow_trainer_api import models

    for manifest in manifests("kubernetes.yaml").values():
        check(manifest)
    for kind, manifest in manifests("kubeflow.yaml").items():
        read = getattr(models, f"TrainerV1alpha1{kind}").from_dict(manifest).to_dict()
        assert covers(read, manifest), "nothing in it is unknown"
    (node,) = manifests("kubeflow.yaml")["TrainingRuntime"]["spec"]["template"]["spec"][
        "replicatedJobs"
    ]
    check({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}} | node["template"])


def covers(read: object, written: object) -> bool:
    if isinstance(written, dict):
        return isinstance(read, dict) and all(
            name in read and covers(read[name], value) for name, value in written.items()
        )
    if isinstance(written, list):
        return isinstance(read, list) and all(map(covers, read, written))
    return read == written


def test_the_manifests_agree_with_themselves():
    job = manifests("kubernetes.yaml")["Job"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    given = values(container)
    assert int(given["NODES"]) == job["completions"] == job["parallelism"]
    assert given["GPUS"] == container["resources"]["limits"]["nvidia.com/gpu"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }
    service = manifests("kubernetes.yaml")["Service"]
    assert service["spec"]["selector"] == job["template"]["metadata"]["labels"]
    assert pod["subdomain"] == service["metadata"]["name"]
    (apart,) = pod["affinity"]["podAntiAffinity"].popitem()[1]
    assert apart["labelSelector"]["matchLabels"] == service["spec"]["selector"]
    assert f'"$RUN-0.{service["metadata"]["name"]}"' in container["args"][0]
    flow = manifests("kubeflow.yaml")
    trainer = flow["TrainJob"]["spec"]["trainer"]
    runtime = flow["TrainingRuntime"]
    assert trainer["numNodes"] == runtime["spec"]["mlPolicy"]["numNodes"] == int(given["NODES"])
    assert flow["TrainJob"]["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    for spec, name in ((job, "train"), (node["template"]["spec"], "node")):
        lost, *rules = spec["podFailurePolicy"]["rules"]
        assert lost["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
        assert lost["action"] == "Ignore"
        codes = {"containerName": name, "operator": "In"}
        assert rules == [
            {"action": "Ignore", "onExitCodes": codes | {"values": [75]}},
            {"action": "FailJob", "onExitCodes": codes | {"values": [2]}},
        ], "what --requeue takes for worth another start does not count"
        assert spec["podReplacementPolicy"] == "Failed"
        pod_spec = spec["template"]["spec"]
        assert pod_spec["containers"][0]["name"] == name
        assert pod_spec["securityContext"]["fsGroup"] == 1000
        mounts = {mount["mountPath"] for mount in pod_spec["containers"][0]["volumeMounts"]}
        assert {"/tmp", "/dev/shm"} <= mounts, "the root of the image may be read-only"
    assert "USER 1000\n" in (PROJECT / "Dockerfile").read_text()
    assert ".launch --requeue " in container["args"][0]
    ours, theirs = container["args"][0], trainer["args"][0]
    theirs = theirs.replace("$PET_NODE_RANK", "$JOB_COMPLETION_INDEX")
    assert theirs.replace("$PET_MASTER_ADDR", "$RUN-0.training") == ours, "one command"
    assert values(container) == values(trainer)


def values(container: dict) -> dict[str, str]:
    """Return the environment variables of a container whose value is in the file."""
    return {variable["name"]: variable["value"] for variable in container["env"][1:]}


def test_a_manifest_names_the_run_once_and_the_pods_read_it_from_a_label():
    job, flow = manifests("kubernetes.yaml")["Job"], manifests("kubeflow.yaml")["TrainJob"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    for file, manifest, pod, label in (
        ("kubernetes.yaml", job, container, "batch.kubernetes.io/job-name"),
        ("kubeflow.yaml", flow, flow["spec"]["trainer"], "jobset.sigs.k8s.io/jobset-name"),
    ):
        text = (PROJECT / "launch" / file).read_text()
        assert re.sub("#.*", "", text).count("my-run") == 1
        assert manifest["metadata"]["name"] == "my-run"
        reference = {"fieldRef": {"fieldPath": f"metadata.labels['{label}']"}}
        assert pod["env"][0] == {"name": "RUN", "valueFrom": reference}
        assert '--run_name "$RUN"' in pod["args"][0]


def test_the_dockerfile_is_clean():
    hadolint = Path(sys.executable).with_name("hadolint")
    assert succeed(hadolint, PROJECT / "Dockerfile") == ""
