#!/bin/sh
# Have the files here read by the tools that they are for (not kuberay.yaml, nor grafana/provisioning).  A tool that is not installed is named and passed over;
# exits with 1 if any tool finds a fault.
cd "$(dirname "$0")" || exit 2
status=0

check() { # what, and the command that reads it
    what=$1
    shift
    if ! command -v "$1" >/dev/null; then
        echo "not checked: $what ($1 is not installed)"
    elif said=$("$@" 2>&1); then
        echo "ok: $what ($1)"
    else
        echo "FAULT: $what ($1)"
        echo "$said"
        status=1
    fi
}


export PELLUCID_API_KEY="${PELLUCID_API_KEY:-check}"
check "rules for alerts" promtool check rules rules.yml
check "what the alerts do" promtool test rules rules.test.yml
check "Prometheus' configuration" promtool check config --syntax-only prometheus.yml
check "the kustomization" kubectl kustomize kubernetes
check "manifests" kubernetes-validate --strict kubernetes/deployment.yaml kubernetes/service.yaml kubernetes/volume.yaml
if docker compose version >/dev/null 2>&1; then # the older docker-compose knows no `name`
    check "the compose file" docker compose -f compose.yaml config --quiet
    check "the compose file, for CPUs" docker compose -f compose.yaml -f compose.cpu.yaml config --quiet
else
    echo "not checked: the compose file (docker compose is not installed)"
fi
check "the Dockerfile for GPUs" hadolint --failure-threshold error Dockerfile
check "the Dockerfile for CPUs" hadolint --failure-threshold error Dockerfile.cpu
check "the board is JSON" python3 -m json.tool grafana/dashboards/pellucid.json
if python3 -c 'import grafana_foundation_sdk' 2>/dev/null; then
    check "the board, as Grafana's own types" python3 grafana/read.py
else
    echo "not checked: the board, as Grafana's own types (grafana-foundation-sdk is not installed)"
fi
exit $status
