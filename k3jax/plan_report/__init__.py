"""What a mesh plan holds, exchanges and should take, from a compilation that needs no GPU.

>>> from k3jax import plan_report
>>> request = plan_report.Request("k3", None, 72, 8, 1, "auto", False, batch=72, context=8192, gpu="gb300")
>>> print(plan_report.text(plan_report.make_report(request, plan_report.compile_apart(request))))
"""

from .compile_step import Compiled, Request, compile_apart, missing
from .report import Report, as_data, make_report, text

__all__ = ["Compiled", "Report", "Request", "as_data", "compile_apart", "make_report", "missing", "text"]
