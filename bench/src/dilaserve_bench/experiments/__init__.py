"""The paper's figures and tables in the twin, with the published numbers beside ours."""
