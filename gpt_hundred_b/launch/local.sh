#!/usr/bin/env bash
# One node: all its GPUs, or two CPU ranks where there is none.
#   gpt_hundred_b/launch/local.sh --config gpt3_1_3b --data.train /data/web/train ...
#   RANKS=8 gpt_hundred_b/launch/local.sh --config demo
set -euo pipefail
cd "$(dirname "$0")/../.."
python=.venv/bin/python
[ -x "$python" ] || python=python3
gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l || true)
ranks=${RANKS:-$([ "$gpus" -gt 0 ] && echo "$gpus" || echo 2)}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$python" -m torch.distributed.run --standalone --nproc-per-node="$ranks" -m gpt_hundred_b.train "$@"
