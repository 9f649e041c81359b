// Checks an answer against a JSON schema. The server enforces the schema anyway; this shows that it did.
// `unchecked` names the keywords of a schema that this page does not check.

const IGNORED = new Set(
  "$schema $id $anchor $comment $defs definitions title description default examples deprecated readOnly writeOnly".split(" "),
);
const CHECKED = new Set(
  (
    "type enum const properties required additionalProperties patternProperties propertyNames minProperties " +
    "maxProperties items prefixItems additionalItems contains minContains maxContains minItems maxItems uniqueItems " +
    "minLength maxLength pattern minimum maximum exclusiveMinimum exclusiveMaximum multipleOf allOf anyOf oneOf not if " +
    "then else $ref"
  ).split(" "),
);
const MAPS = new Set(["properties", "patternProperties", "$defs", "definitions"]);
const DATA = new Set(["enum", "const", "default", "examples"]);

/** Returns the keywords of a schema that `mistakes` does not check, sorted. */
export function unchecked(schema, found = new Set()) {
  if (Array.isArray(schema)) schema.forEach((each) => unchecked(each, found));
  else if (schema !== null && typeof schema === "object")
    for (const [keyword, value] of Object.entries(schema)) {
      if (DATA.has(keyword)) continue;
      if (MAPS.has(keyword)) unchecked(Object.values(value), found);
      else if (CHECKED.has(keyword)) unchecked(value, found);
      else if (!IGNORED.has(keyword)) found.add(keyword);
    }
  return [...found].sort();
}

/** Returns what is wrong with `value`, one sentence each; an empty list if it satisfies the schema. */
export function mistakes(schema, value, root = schema, path = "$") {
  if (schema === true) return [];
  if (schema === false) return [`${path} may not be there`];
  if (typeof schema.$ref === "string") {
    const { $ref, ...rest } = schema;
    return [...mistakes(resolve(root, $ref), value, root, path), ...mistakes(rest, value, root, path)];
  }
  const fails = (each, at = value, where = path) => mistakes(each, at, root, where);
  return [
    ...ofAny(schema, value, path),
    ...ofCombinations(schema, path, fails),
    ...(typeof value === "number" ? ofNumber(schema, value, path) : []),
    ...(typeof value === "string" ? ofString(schema, value, path) : []),
    ...(Array.isArray(value) ? ofArray(schema, value, path, fails) : []),
    ...(isObject(value) ? ofObject(schema, value, path, fails) : []),
  ];
}

const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
const has = (object, name) => Object.hasOwn(object, name);
const shown = (value) => JSON.stringify(value);

/** Equal values have equal texts, whatever the order of their properties. */
const canonical = (value) =>
  JSON.stringify(value, (_, each) =>
    isObject(each) ? Object.fromEntries(Object.entries(each).sort(([a], [b]) => (a < b ? -1 : 1))) : each,
  );

function resolve(root, reference) {
  if (!reference.startsWith("#")) throw new Error(`${reference} is in another document, which this page does not read`);
  return reference
    .slice(1)
    .split("/")
    .filter(Boolean)
    .map((part) => decodeURIComponent(part).replaceAll("~1", "/").replaceAll("~0", "~"))
    .reduce((schema, part) => {
      if (!has(schema, part)) throw new Error(`${reference} is not in the schema`);
      return schema[part];
    }, root);
}

function isOfType(value, type) {
  if (type === "null") return value === null;
  if (type === "array") return Array.isArray(value);
  if (type === "object") return isObject(value);
  return type === "integer" ? Number.isInteger(value) : typeof value === type;
}

function ofAny(schema, value, path) {
  const found = [];
  const types = schema.type === undefined ? null : [schema.type].flat();
  if (types && !types.some((type) => isOfType(value, type))) found.push(`${path} must be ${types.join(" or ")}`);
  if (schema.enum && !schema.enum.some((each) => canonical(each) === canonical(value)))
    found.push(`${path} must be one of ${schema.enum.map(shown).join(", ")}`);
  if (has(schema, "const") && canonical(schema.const) !== canonical(value))
    found.push(`${path} must be ${shown(schema.const)}`);
  return found;
}

function ofCombinations(schema, path, fails) {
  const found = (schema.allOf ?? []).flatMap((each) => fails(each));
  const matches = (list) => list.filter((each) => !fails(each).length).length;
  if (schema.anyOf && !matches(schema.anyOf)) found.push(`${path} satisfies no schema of anyOf`);
  if (schema.oneOf && matches(schema.oneOf) !== 1)
    found.push(`${path} satisfies ${matches(schema.oneOf)} schemas of oneOf, not one`);
  if (has(schema, "not") && !fails(schema.not).length) found.push(`${path} satisfies the schema of not`);
  if (has(schema, "if")) found.push(...fails((fails(schema.if).length ? schema.else : schema.then) ?? true));
  return found;
}

function ofNumber(schema, value, path) {
  const found = [];
  if (value < schema.minimum) found.push(`${path} is below ${schema.minimum}`);
  if (value > schema.maximum) found.push(`${path} is above ${schema.maximum}`);
  if (value <= schema.exclusiveMinimum) found.push(`${path} must be above ${schema.exclusiveMinimum}`);
  if (value >= schema.exclusiveMaximum) found.push(`${path} must be below ${schema.exclusiveMaximum}`);
  if (schema.multipleOf && Math.abs(value / schema.multipleOf - Math.round(value / schema.multipleOf)) > 1e-9)
    found.push(`${path} is no multiple of ${schema.multipleOf}`);
  return found;
}

function ofString(schema, value, path) {
  const found = [];
  const length = [...value].length;
  if (length < schema.minLength) found.push(`${path} is shorter than ${schema.minLength}`);
  if (length > schema.maxLength) found.push(`${path} is longer than ${schema.maxLength}`);
  if (schema.pattern && !new RegExp(schema.pattern, "u").test(value)) found.push(`${path} does not match ${schema.pattern}`);
  return found;
}

function ofArray(schema, value, path, fails) {
  const found = [];
  const first = schema.prefixItems ?? (Array.isArray(schema.items) ? schema.items : []);
  const rest = Array.isArray(schema.items) ? schema.additionalItems : schema.items;
  value.forEach((item, index) => found.push(...fails(first[index] ?? rest ?? true, item, `${path}[${index}]`)));
  if (value.length < schema.minItems) found.push(`${path} has fewer than ${schema.minItems} items`);
  if (value.length > schema.maxItems) found.push(`${path} has more than ${schema.maxItems} items`);
  if (schema.uniqueItems && new Set(value.map(canonical)).size < value.length) found.push(`${path} has equal items`);
  if (has(schema, "contains")) {
    const count = value.filter((item) => !fails(schema.contains, item).length).length;
    if (count < (schema.minContains ?? 1) || count > schema.maxContains)
      found.push(`${path} contains ${count} items of the wanted kind`);
  }
  return found;
}

function ofObject(schema, value, path, fails) {
  const found = [];
  for (const name of schema.required ?? []) if (!has(value, name)) found.push(`${path} lacks ${shown(name)}`);
  const count = Object.keys(value).length;
  if (count < schema.minProperties) found.push(`${path} has fewer than ${schema.minProperties} properties`);
  if (count > schema.maxProperties) found.push(`${path} has more than ${schema.maxProperties} properties`);
  const patterns = Object.entries(schema.patternProperties ?? {}).map(([text, each]) => [new RegExp(text, "u"), each]);
  for (const [name, item] of Object.entries(value)) {
    const where = /^\w+$/.test(name) ? `${path}.${name}` : `${path}[${shown(name)}]`;
    const own = has(schema.properties ?? {}, name) ? [schema.properties[name]] : [];
    const schemas = [...own, ...patterns.filter(([pattern]) => pattern.test(name)).map(([, each]) => each)];
    if (!schemas.length && has(schema, "additionalProperties")) schemas.push(schema.additionalProperties);
    found.push(...schemas.flatMap((each) => fails(each, item, where)));
    if (has(schema, "propertyNames")) found.push(...fails(schema.propertyNames, name, `the name ${shown(name)}`));
  }
  return found;
}
