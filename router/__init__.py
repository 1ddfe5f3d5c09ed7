"""The router: text in, text out. It owns a request from arrival to the last token and never sees a tensor.

Reading order: service.py (the public gRPC front), validation.py (request -> plan), pipeline.py (a plan's way over
the workers), text_stream.py (tokens -> text), record.py (usage and times).
"""
