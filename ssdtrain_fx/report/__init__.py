"""Report: what is offloaded, and why the rest is not, as text, JSON, graphs and an HTML page."""

from ssdtrain_fx.report.explain import explain
from ssdtrain_fx.report.graph_report import GraphReport
from ssdtrain_fx.report.report import Report

__all__ = ["GraphReport", "Report", "explain"]
