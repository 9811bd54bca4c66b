"""Look inside: what would be offloaded, and why not the rest. Text, JSON, graphs and a page for the browser."""

from ssdtrain_fx.report.explain import explain
from ssdtrain_fx.report.graph_report import GraphReport
from ssdtrain_fx.report.report import Report

__all__ = ["GraphReport", "Report", "explain"]
