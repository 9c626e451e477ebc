"""What users look at: plans as text, analyses of what they take, verdicts on implementations, exchanges of devices.

Nothing here changes a plan. A new page of inspection is a function of a `PlanRecord` here and a method of `Plan`.
"""
