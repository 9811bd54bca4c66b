"""What a policy gets and gives, for programs that write one: see :mod:`ssdtrain_fx.passes.planning.policy`."""

from ssdtrain_fx.passes.planning.policy import Budget, Costs, Decision, Keep, Placement, Policy, StepAnalysis

__all__ = ["Budget", "Costs", "Decision", "Keep", "Placement", "Policy", "StepAnalysis"]
