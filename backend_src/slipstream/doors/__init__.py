"""What Triton calls: tensors to requests, text in and out, answers, metrics."""
