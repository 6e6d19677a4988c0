// Names for what Gradio leaves without one: screen readers, voice control and tests go by them.
const NAMES = [
  ["#composer textarea", "Message"],
  ["#chats .toggle-button", "Chats"],
  ["#settings .toggle-button", "Settings"],
  ["#chatbot .bubble-wrap", "Conversation"],
  ["#batch-files button.upload-container", "Drop File Here - or - Click to Upload"],
  ["#schema .cm-content", "JSON Schema"],
  ["#schema-pydantic .cm-content", "Pydantic classes"],
];
const name = () => {
  for (const [selector, label] of NAMES)
    for (const node of document.querySelectorAll(selector)) if (node.getAttribute("aria-label") !== label) node.setAttribute("aria-label", label);
  for (const side of document.querySelectorAll(".sidebar")) {
    const button = side.querySelector(".toggle-button"), isOpen = side.classList.contains("open");
    if (button && button.getAttribute("aria-expanded") !== String(isOpen)) button.setAttribute("aria-expanded", String(isOpen));
    // What is out of sight must not be reached with the Tab key.
    const content = side.querySelector(".sidebar-content");
    if (content && content.inert === isOpen) content.inert = !isOpen;
  }
  for (const box of document.querySelectorAll(".cm-scroller, #chatbot .bubble-wrap")) if (box.tabIndex !== 0) box.tabIndex = 0;
};
let isDue = false;
new MutationObserver(() => {
  if (isDue) return;
  isDue = true;
  setTimeout(() => { isDue = false; name(); }, 200);
}).observe(document.body, { childList: true, subtree: true, attributes: true, attributeFilter: ["class"] });
name();
document.documentElement.lang ||= "en";
