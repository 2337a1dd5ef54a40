# Python with venv, where the base image has none.
set -eu
if ! python3 -c 'import ensurepip, venv' 2>/dev/null; then
    apt-get update -q
    apt-get install -y -q --no-install-recommends python3 python3-venv ca-certificates
    rm -rf /var/lib/apt/lists/*
fi
