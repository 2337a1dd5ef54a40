"""What a rank does within a step: model, optimizer, gradients."""
