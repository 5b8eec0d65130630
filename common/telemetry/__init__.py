"""Telemetry of a run: progress bar, JSONL and TensorBoard metrics, MFU, where the time goes, traces, the HTML report.

`Telemetry` is all that a training loop needs; `measure_matmul_peak` gives what MFU is a share of; `Section` and the
blocks are what a recipe's own parts of the report are made of. On the command line:

    python -m common.telemetry report RUN_DIR
    python -m common.telemetry compare RUN_DIR RUN_DIR...
"""

from common.telemetry.log import RunLog, read_log
from common.telemetry.peak import MatmulPeak, measure_matmul_peak
from common.telemetry.recorder import Telemetry
from common.telemetry.sections import Area, Cards, Lines, Picture, Section, Series, Stack, Table, Text

__all__ = [
    "Area",
    "Cards",
    "Lines",
    "MatmulPeak",
    "Picture",
    "RunLog",
    "Section",
    "Series",
    "Stack",
    "Table",
    "Telemetry",
    "Text",
    "measure_matmul_peak",
    "read_log",
]
