"""Several models behind one address: each model's engines are a Serve application, which ingresses find."""
