"""From figures to a verdict: the decision (`decision`), the comparison of times (`times`),
statistics (`stats`)."""
