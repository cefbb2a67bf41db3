"""What a step costs: model shapes, device profiles, kernel formulas, memory. Start at `pricer.StepPricer`."""
