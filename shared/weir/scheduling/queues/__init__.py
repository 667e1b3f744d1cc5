"""Requests that wait: by model, lane, tenant, and inside a tenant by the policy's order."""
