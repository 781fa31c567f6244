"""What the gradients of softmax and log-softmax are."""


def input_gradient(op, grad_output, output):
    """In float64, of rows, from the gradient of the result and the result as it was rounded."""
    g, y = grad_output.double(), output.double()
    p = y.exp() if op == "log_softmax" else y
    share = g if op == "log_softmax" else g * p
    return share - p * share.sum(1, keepdim=True)
