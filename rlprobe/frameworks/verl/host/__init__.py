"""What runs before the training processes: plan, launch, assets."""
