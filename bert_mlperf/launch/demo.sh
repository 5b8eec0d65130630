#!/usr/bin/env bash
# `make bert-mlperf`: real text -> shards -> two ranks train to the target -> compliance check, score, report.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=.venv/bin/python
run=runs/bert_demo
began=$SECONDS
echo "1/4 text, vocabulary and start weights"
$python -m bert_mlperf.data fetch --corpus kjv --output data/bert
downloaded=$SECONDS
echo "2/4 text to shards"
$python -m bert_mlperf.data prepare --input data/bert/kjv.txt --output data/bert/kjv --vocab data/bert/vocab.txt \
    --max-length 128 --max-predictions 20 --duplicates 5 --shards 8 --heldout-share 0.05
echo "3/4 training"
bert_mlperf/launch/local.sh --config demo --run-dir "$run" "$@"
echo "4/4 score"
$python -m bert_mlperf.score "$run" --check --plot "$run/score.png"
echo "done in $((SECONDS - downloaded)) s ($((downloaded - began)) s of downloads not counted)"
echo "report: $run/report.html"
